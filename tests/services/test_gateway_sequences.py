"""A sequence's way through placements, duplicates, losses and errors, against a router and workers that do as told."""

import asyncio
import contextlib
import json
import time

import grpc
import msgspec
import pytest
from gateway_cluster import OUTPUT, Worker, eventually, finish, output, setting, taken

from engine.hashing import block_hashes, root_hash
from engine.request import TokenBatch, TokenOutput
from services.gateway import attempt
from services.gateway.errors import ApiError
from services.gateway.generation import Running
from services.rpc import router_pb2, worker_pb2
from services.worker.token_publisher import TokenPublisher
from services.zmq_sockets import push_socket


async def test_all_goes_well() -> None:
    async with setting([finish]) as all_:
        sequence = all_.sequence()
        await sequence.run()
        assert (sequence.finish_reason, sequence.failure) == ("length", None)
        assert taken(sequence) == sequence.output_token_ids == OUTPUT
        await eventually(lambda: all_.router.released == [0])
        (report,) = all_.router.reports
        assert (report.outcome, report.decode, report.prefill) == (router_pb2.OK, "a" * 32, "")
        assert report.output_tokens == 4 and report.ttft_seconds > 0 and not report.prefill_failed
        assert [(chain.layout, len(chain.block_hashes)) for chain in all_.router.placed[0].chains] == [("l1", 2)]
        assert all_.router.workers[0].aborted == []


async def test_hashes_of_every_kind_of_blocks_that_workers_keep() -> None:
    async with setting([finish], [finish]) as all_:
        sequence = all_.sequence(cache_salt="s")
        await sequence.run()
        found = {chain.layout: list(chain.block_hashes) for chain in all_.router.placed[0].chains}
        assert found == {
            layout: block_hashes(range(40), size, root_hash(fingerprint="f", layout=layout, block_size=size, salt="s"))
            for layout, size in (("l1", 16), ("l2", 32))
        }


async def test_first_token_comes_twice_and_finish_with_it() -> None:
    def twice(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        stranger = output(request, 0, [99])
        stranger.attempt = 5
        return [
            stranger,
            output(request, 0, [11]),
            output(request, 0, [11], cached_tokens=16),
            output(request, 0, [11, 12]),
            output(request, 1, [12]),
            output(request, 0, [11, 12], finish_reason="stop", stop_token_id=12),
        ]

    async with setting([twice]) as all_:
        sequence = all_.sequence()
        await sequence.run()
        outs = sequence.take()
        assert [out.token_ids for out in outs] == [[11], [12], []]
        assert sequence.finish_reason == "stop"
        assert sequence.cached_tokens == 16


async def test_lost_tokens_are_computed_again() -> None:
    def gap(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return [output(request, 0, [11]), output(request, 2, [13])]

    async with setting([gap, finish]) as all_:
        sequence = all_.sequence()
        await sequence.run()
        assert taken(sequence) == OUTPUT
        worker = all_.router.workers[0]
        assert [request.attempt for request in worker.submitted] == [0, 1]
        assert list(worker.submitted[1].output_token_ids) == [11]
        await eventually(lambda: worker.aborted == [0] and sorted(all_.router.released) == [0, 1])
        # What got lost on the way says nothing of the worker.
        assert all_.router.outcomes == {0: router_pb2.UNTOLD, 1: router_pb2.OK}
        assert sorted((report.attempt, report.output_tokens) for report in all_.router.reports) == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, router_pb2.CLIENT_ERROR),
        (grpc.StatusCode.INTERNAL, router_pb2.WORKER_ERROR),
        (grpc.StatusCode.UNAVAILABLE, router_pb2.LOST),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, router_pb2.UNTOLD),
        (grpc.StatusCode.FAILED_PRECONDITION, router_pb2.UNTOLD),
    ],
)
async def test_what_a_refusal_says_of_a_worker(code: grpc.StatusCode, outcome: router_pb2.Outcome) -> None:
    def refuses(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        raise grpc.RpcError(code)

    async with setting([refuses], [finish]) as all_:
        await all_.sequence().run()
        moved = outcome != router_pb2.CLIENT_ERROR
        await eventually(lambda: len(all_.router.reports) == 1 + moved)
        assert all_.router.outcomes == {0: outcome} | ({1: router_pb2.OK} if moved else {})
        assert {report.attempt: report.decode[0] for report in all_.router.reports}[0] == "a"
        assert not any(report.HasField("ttft_seconds") for report in all_.router.reports if not report.attempt)


async def test_a_sick_fleet_is_spared_a_storm_of_tries() -> None:
    """Every worker refuses everything: after what was saved up, requests are told to come later, and few try again."""

    def refuses(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        raise grpc.RpcError(grpc.StatusCode.INTERNAL)

    async with setting([refuses], [refuses], [refuses], wait=0.05) as all_:
        number = 0
        failures: list[ApiError | None] = []
        started = time.monotonic()
        while number < 400:
            sequences = [all_.sequence(request_id=f"cmpl-{number + i}-0") for i in range(20)]
            await asyncio.gather(*(sequence.run() for sequence in sequences))
            number += len(sequences)
            failures += [sequence.failure for sequence in sequences]
        tries = sum(len(worker.submitted) for worker in all_.router.workers)
        assert all(failure is not None and failure.status == 503 and failure.retry_after for failure in failures)
        assert any("tried again" in str(failure) for failure in failures)
        assert number < tries <= number + 100 + 0.2 * number + 10 * (time.monotonic() - started) + 1


async def test_a_stream_that_has_begun_is_not_given_up_for_the_budget() -> None:
    def breaks_off(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return [output(request, 0, [11]), output(request, 0, [], finish_reason="abort")]

    def refuses(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        raise grpc.RpcError(grpc.StatusCode.INTERNAL)

    async with setting([breaks_off], [refuses], [finish]) as all_:
        now = time.monotonic()
        while all_.placements.retries.spend(now):
            pass
        sequence = all_.sequence()
        await sequence.run()
        assert (sequence.failure, taken(sequence), sequence.attempt) == (None, OUTPUT, 2)


async def test_router_hears_that_a_prefill_worker_did_not_deliver() -> None:
    """Also where the first token has come from that worker, so that the other's is known already."""

    def recomputes(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        first, *others = finish(worker, request)
        return [first, output(request, 0, [11], prefill_failed=True), *others]

    async with setting([recomputes]) as all_:
        await all_.sequence().run()
        await eventually(lambda: bool(all_.router.reports))
        assert all_.router.reports[0].prefill_failed and all_.router.reports[0].output_tokens == len(OUTPUT)


async def test_a_worker_that_aborts_or_refuses_is_excluded() -> None:
    def aborts(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return [output(request, 0, [11]), output(request, 1, [], finish_reason="abort")]

    def drains(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        raise grpc.RpcError(grpc.StatusCode.FAILED_PRECONDITION)

    async with setting([aborts], [drains], [finish]) as all_:
        sequence = all_.sequence()
        await sequence.run()
        assert taken(sequence) == OUTPUT
        a, b, c = all_.router.workers
        assert (len(a.submitted), len(b.submitted), len(c.submitted)) == (1, 1, 1)
        assert list(all_.router.placed[-1].exclude_incarnations) == [a.incarnation, b.incarnation]


async def test_an_attempt_that_runs_although_its_worker_was_given_up_is_not_heard() -> None:
    """The connection broke behind the request: it may run twice, and its tokens are told once."""
    tasks: list[asyncio.Task[None]] = []

    def later(request: worker_pb2.SubmitRequest, outputs: list[TokenOutput]) -> None:
        async def push() -> None:
            for each in outputs:
                await asyncio.sleep(0.05)
                socket = push_socket(request.reply_to, None)
                socket.send(msgspec.msgpack.encode(TokenBatch("late" * 8, 0, [each])))
                socket.close(linger=1000)

        tasks.append(asyncio.create_task(push()))

    def runs_all_the_same(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        ids = [91, 92, 93, 94]
        later(request, [output(request, i, ids[i : i + 1]) for i in range(3)])
        later(request, [output(request, 0, ids, finish_reason="length")])
        raise grpc.RpcError(grpc.StatusCode.UNAVAILABLE)

    def slowly(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        first, *others = finish(worker, request)
        later(request, others)
        return [first]

    async with setting([runs_all_the_same], [slowly]) as all_:
        sequence = all_.sequence()
        await sequence.run()
        await asyncio.gather(*tasks)
        assert (taken(sequence), sequence.finish_reason, sequence.attempt) == (OUTPUT, "length", 1)
        first, second = all_.router.workers
        await eventually(lambda: sorted(all_.router.released) == [0, 1])
        await eventually(lambda: first.aborted == [0])  # it is told that nobody wants it
        assert second.aborted == [] and len(second.submitted) == 1


async def test_a_worker_that_leaves_before_it_has_taken_the_request_is_left() -> None:
    """As one that was stopped: gRPC cancels the call with its channel, and the request must not end with it."""
    async with setting([finish], [finish]) as all_:
        stopped, _ = all_.router.workers
        stopped.stopped = True
        sequence = all_.sequence()
        running = asyncio.create_task(sequence.run())
        await eventually(lambda: bool(stopped.submitted))
        await all_.leave(stopped)
        await asyncio.wait_for(running, 5)
        assert (sequence.finish_reason, sequence.failure, taken(sequence)) == ("length", None, OUTPUT)


async def test_the_only_worker_stands_still_and_has_the_request_again() -> None:
    """It is gone for a while, and when it is a member again it is no reason to wait for another one in vain."""

    def hangs(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return [output(request, 0, [11])]

    async with setting([hangs, finish], wait=30) as all_:
        running, sequence = Running(all_.placements, all_.tokens, "g" * 32), all_.sequence()
        running.sequences.add(sequence)
        task = asyncio.create_task(sequence.run())
        await eventually(lambda: sequence.output_token_ids == [11])
        (worker,) = all_.router.workers
        await all_.leave(worker)
        await eventually(lambda: len(all_.router.placed) > 2)  # there is nobody
        assert list(all_.router.placed[-1].exclude_incarnations) == [worker.incarnation]
        await all_.come_back(worker)
        await asyncio.wait_for(task, 20)
        assert (sequence.failure, sequence.attempt, taken(sequence)) == (None, 1, OUTPUT)


async def test_a_worker_whose_connection_breaks_is_left() -> None:
    def hangs(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return [output(request, 0, [11])]

    async with setting([hangs], [finish]) as all_:
        sequence = all_.sequence()
        moved: list[str] = []

        def lose(incarnation: str) -> None:
            moved.append(incarnation)
            if sequence.worker is not None and sequence.worker.incarnation == incarnation:
                sequence.lose("gone", exclude=True)

        all_.placements.on_lost(lose)
        running = asyncio.create_task(sequence.run())
        await eventually(lambda: sequence.output_token_ids == [11])
        await all_.router.workers[0].server.stop(0)
        async with asyncio.timeout(5):
            await running
        assert taken(sequence) == OUTPUT
        assert all_.router.workers[0].incarnation in moved


async def test_a_worker_error_is_a_typed_error_without_its_text() -> None:
    def fails(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return [output(request, 0, [], finish_reason="error", error="secret path /x")]

    async with setting([fails]) as all_:
        sequence = all_.sequence()
        await sequence.run()
        assert sequence.failure is not None and sequence.failure.status == 500
        assert "secret" not in str(sequence.failure)
        await eventually(lambda: all_.router.released == [0])


async def test_what_no_worker_can_run_is_the_clients_error() -> None:
    def refuses(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        raise grpc.RpcError(grpc.StatusCode.INVALID_ARGUMENT)

    async with setting([refuses], [finish]) as all_:
        sequence = all_.sequence()
        await sequence.run()
        assert sequence.failure is not None and sequence.failure.status == 400
        assert json.loads(sequence.failure.body()) == {
            "error": {"message": "refused", "type": "invalid_request_error", "param": None, "code": None}
        }


async def test_nobody_there_is_503_with_the_routers_retry_after() -> None:
    async with setting() as all_:
        sequence = all_.sequence()
        await sequence.run()
        assert sequence.failure is not None and sequence.failure.status == 503
        assert sequence.failure.retry_after == 7
        assert len(all_.router.placed) > 1  # it was tried again


@pytest.mark.parametrize(("enough", "outcome"), [(0.2, router_pb2.TIMED_OUT), (1.0, router_pb2.UNTOLD)])
async def test_the_deadline_ends_it(enough: float, outcome: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is laid to the worker if it had the time that a worker needs."""
    monkeypatch.setattr(attempt, "_ENOUGH_SECONDS", enough)

    def hangs(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return []

    async with setting([hangs]) as all_:
        sequence = all_.sequence(deadline=asyncio.get_running_loop().time() + 0.9)
        await sequence.run()
        assert sequence.failure is not None and sequence.failure.status == 504
        await eventually(lambda: all_.router.workers[0].aborted == [0] and all_.router.released == [0])
        assert all_.router.outcomes == {0: outcome}


async def test_a_deadline_that_is_over_soon_after_the_request_moved_is_not_the_new_workers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "_ENOUGH_SECONDS", 0.1)

    def hangs(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return []

    async with setting([hangs], [hangs]) as all_:
        sequence = all_.sequence(deadline=asyncio.get_running_loop().time() + 2.0)
        running = asyncio.create_task(sequence.run())
        await eventually(lambda: sequence.worker is not None)
        await asyncio.sleep(1.2)
        sequence.lose("it is gone", exclude=True, outcome=router_pb2.LOST)
        await running
        assert sequence.failure is not None and sequence.failure.status == 504
        await eventually(lambda: all_.router.outcomes == {0: router_pb2.LOST, 1: router_pb2.UNTOLD})


async def test_a_client_that_leaves_is_told_to_worker_and_router() -> None:
    def hangs(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        return [output(request, 0, [11])]

    async with setting([hangs]) as all_:
        sequence = all_.sequence()
        running = asyncio.create_task(sequence.run())
        await eventually(lambda: sequence.output_token_ids == [11])
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await eventually(lambda: all_.router.workers[0].aborted == [0] and all_.router.released == [0])
        assert all_.router.outcomes == {0: router_pb2.ABORTED}


async def test_garbage_on_the_token_socket_is_dropped() -> None:
    async with setting([finish]) as all_:
        socket = push_socket(all_.tokens.address, None)
        for frame in (b"", b"\x80\x04garbage", b"\xff" * 100, msgspec.msgpack.encode([1, 2])):
            socket.send(frame)
        await eventually(lambda: all_.tokens.malformed == 4)
        sequence = all_.sequence()
        await sequence.run()
        assert taken(sequence) == OUTPUT
        socket.close()


def test_errors_have_openai_shape() -> None:
    error = ApiError(503, "none", retry_after=3).response()
    assert error.headers["retry-after"] == "3"
    assert msgspec.json.decode(bytes(error.body)) == {
        "error": {"message": "none", "type": "invalid_request_error", "param": None, "code": None}
    }


async def test_last_tokens_that_got_lost_on_the_way_are_missed() -> None:
    """No later token of the sequence tells; the worker's word of how much it has sent does."""
    publishers: list[TokenPublisher] = []

    def lose_the_rest(worker: Worker, request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
        publisher = TokenPublisher(worker.incarnation, None)
        publishers.append(publisher)
        publisher.publish(request.reply_to, [output(request, 0, OUTPUT[:2])])
        publisher.count()
        publisher._sequence[request.reply_to] += 1  # a message with the other tokens, of which nothing arrives
        publisher.count()
        return []

    async with setting([lose_the_rest, finish]) as all_:
        running = Running(all_.placements, all_.tokens, "g" * 32)
        sequence, other = all_.sequence(), all_.sequence(request_id="cmpl-2-0")
        running.sequences |= {sequence, other}
        await sequence.run()
        assert (sequence.finish_reason, sequence.failure, sequence.attempt) == ("length", None, 1)
        assert sequence.output_token_ids == OUTPUT and list(all_.router.placed[1].exclude_incarnations) == []
        assert [list(request.output_token_ids) for request in all_.router.workers[0].submitted] == [[], OUTPUT[:2]]
        assert other.attempt == 0
        for publisher in publishers:
            publisher.close()
