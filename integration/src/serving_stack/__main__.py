# SPDX-License-Identifier: Apache-2.0
"""`python -m serving_stack`: the same command line as the `serving-stack` script."""

import sys

from .cli import main

sys.exit(main())
