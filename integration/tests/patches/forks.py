# SPDX-License-Identifier: Apache-2.0
"""Run scripts, each in a fork of this process, which has imported what takes long: `forks.py SOCKET MODULE...`.

Prints one line when the modules are imported: the files of all that is, except `FORGOTTEN`. A client sends
`[script, variables]` and shuts its side; it is sent `[exit status, stdout, stderr]`. The server ends when its standard
input does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback

#: Imported with the others, but patched: a fork imports it anew where its script does.
FORGOTTEN = ("vllm.platforms.cpu",)


def main() -> None:
    address, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    for module in FORGOTTEN:
        sys.modules.pop(module, None)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        print(json.dumps([file for file in files if isinstance(file, str)]), flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    serve(connection)
                    os._exit(0)


def serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as request:
        script, variables = json.load(request)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            connection.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            for name, value in variables.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            os._exit(execute(script))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        reply = [status, out.read().decode(errors="replace"), err.read().decode(errors="replace")]
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(reply).encode())


def execute(script: str) -> int:
    """Return the exit status that `python -c` would have."""
    sys.argv[:] = ["-c"]
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
    os._exit(0)  # the interpreter would take seconds to put away what it has imported
