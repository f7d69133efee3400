"""An OpenAI server whose delays and faults are known; load generators are measured against it.

`start_server` runs it as a process of its own; `python -m bench.scripted_server --script F --log F` is that process.
"""

from bench.scripted_server.script import Fault, Script, ScriptedAnswer, Sent
from bench.scripted_server.start import ScriptedServer, start_server

__all__ = ["Fault", "Script", "ScriptedAnswer", "ScriptedServer", "Sent", "start_server"]
