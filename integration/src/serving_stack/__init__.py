# SPDX-License-Identifier: Apache-2.0
"""Assemble Dynamo, vLLM, NIXL and this project's plugins into one serving stack.

The package is light: `chat`, `doctor`, `patches`, `model` and the profiles work on any machine. `serving-stack install`
brings the engines a profile needs. Start with `serving-stack --help`.
"""

from .errors import StackError
from .version import __version__

__all__ = ["StackError", "__version__"]
