# SPDX-License-Identifier: Apache-2.0
"""`python -m dynamo_structural_tags.conformance`: the command `tool-conformance`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
