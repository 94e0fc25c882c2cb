"""Parts of the server that run in separate processes, so that they do not compete for its GIL and can be killed.

`process_group.py` starts, watches and ends them, and `process_engine.py` starts them again. `child.py` is what runs in
each. `calls.py` calls one method after the other; `async_calls.py`, with `async_child.py`, any number at a time.
Messages (`messages.py`) go over a socket pair that only the two processes have. Arrays travel beside them in shared
memory. The memory has no name and belongs to the receiver (`channel.py`), so nothing is left behind. A process on
another host has one here that stands in for it (`relay.py`); Ray starts it (`ray_hosts.py`, `ray_replicas.py`).
"""
