"""A judge for `tinker-local train --eval`: keeps every reply in a file, for the scorer of the task to judge.

The command loads it as it loads a user's; the environment's REPLIES names the file, which gets a JSON line for each.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep(reply: str, row: Mapping[str, Any]) -> float:
    """1 if the first line of the reply is the row's answer but for blanks around it."""
    with Path(os.environ["REPLIES"]).open("a") as file:
        file.write(json.dumps([row["answer"], reply]) + "\n")
    return float(reply.strip().partition("\n")[0].strip() == row["answer"])
