# SPDX-License-Identifier: Apache-2.0
"""One line: what this plugin does to its upstream, in the field's own words.

Status: planned. Nothing is registered yet: importing this package changes nothing, and it has no entry point.

What it will do, and for whom. This docstring is the user's manual: it grows with the code.
"""

from ._compat import SUPPORTED, UnsupportedUpstreamError, check
from .version import __version__

__all__ = ["SUPPORTED", "UnsupportedUpstreamError", "__version__", "check"]
