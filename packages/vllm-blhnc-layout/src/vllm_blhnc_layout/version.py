# SPDX-License-Identifier: Apache-2.0
"""Single source of the distribution's version."""

__version__ = "0.1.0.dev0"
