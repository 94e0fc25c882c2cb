"""Parts of the server that run in separate processes, so that they do not compete for its GIL and can be killed.

`process_group.py` starts, watches and ends them; `child.py` is what runs in each; `calls.py` calls one method after the
other. Messages (`messages.py`) go over a socket pair that only the two processes have. Arrays travel beside them in
shared memory. The memory has no name and belongs to the receiver (`channel.py`), so nothing is left behind.
"""
