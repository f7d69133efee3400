"""How attempts of requests are named: `RESPONSE-SEQUENCE/ATTEMPT`."""


def attempt_name(request_id: str, attempt: int) -> str:
    """Of a sequence's id, which is `RESPONSE-SEQUENCE`, and the number of its attempt."""
    return f"{request_id}/{attempt}"


def is_first(request_id: str, attempt: int) -> bool:
    """Whether it is the first that is asked for a response: its first sequence, and that for the first time."""
    return attempt == 0 and request_id.rpartition("-")[2] in ("0", request_id)


def is_named(request: str, attempt: str) -> bool:
    """Whether `request` names this attempt: any leading part of the name does, such as the response's id."""
    return attempt == request or attempt.startswith((request + "/", request + "-"))
