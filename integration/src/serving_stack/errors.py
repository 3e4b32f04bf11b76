# SPDX-License-Identifier: Apache-2.0
"""The one exception a user is meant to read."""


class StackError(Exception):
    """A failure whose message names the offending value and, where there is one, the cure.

    The command line prints the message without a traceback and exits with status 1.
    """
