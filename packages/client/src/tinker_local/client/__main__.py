"""Run a program with the names of a local server's models: `python -m tinker_local.client -m MODULE ARGUMENTS…`.

The program finds tokenizers, processors and renderers of these names without a hub (`use_served_names`), and the server
as `ServiceClient` does: $TINKER_BASE_URL and $TINKER_API_KEY, else the local defaults, which the program then gets.
"""

import os
import runpy
import sys
from pathlib import Path

import tinker
from tinker_local.client.endpoint import resolve_endpoint
from tinker_local.client.served_names import use_served_names

USAGE = "usage: python -m tinker_local.client (-m MODULE | PROGRAM.py) [ARGUMENTS…]"


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        raise SystemExit(USAGE)
    endpoint = resolve_endpoint(None, None)
    os.environ |= {"TINKER_BASE_URL": endpoint.base_url, "TINKER_API_KEY": endpoint.api_key}
    try:
        use_served_names()
    except tinker.APIError as error:
        raise SystemExit(str(error)) from None
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
