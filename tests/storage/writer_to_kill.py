"""Processes that write checkpoints in two threads until they are killed; forked here, as importing takes a second.

Reads `DATA_DIR SEED` lines. For each it forks a writer, which says `ready PID`, then `try NAME SEED` before and
`done NAME SEED` after each write or overwrite, SEED -1 for a deletion. `dead` follows once the writer was killed.
"""

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_states import make_record, make_state  # type: ignore[import-not-found]
from tinker_local.backend.storage import Store


def write_for_ever(store: Store, thread: int, seed: int) -> None:
    while True:
        for index in range(3):
            record = make_record(f"t{thread}-{index}")
            say("try", record.name, seed)
            store.write_checkpoint(record, make_state(seed, width=2048), overwrite=True)
            say("done", record.name, seed)
            seed += 1
        say("try", f"t{thread}-0", -1)
        store.delete_checkpoint(make_record(f"t{thread}-0"))
        say("done", f"t{thread}-0", -1)


def run_writer(data_dir: Path, seed: int) -> None:
    store = Store(data_dir)
    say("ready", os.getpid())
    threads = [threading.Thread(target=write_for_ever, args=(store, n, seed + n * 500)) for n in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write call is one whole line


if __name__ == "__main__":
    for line in sys.stdin:
        folder, first_seed = line.split()
        if (pid := os.fork()) == 0:
            run_writer(Path(folder), int(first_seed))
        os.waitpid(pid, 0)
        say("dead")
