# SPDX-License-Identifier: Apache-2.0
"""The patch carrier, on throw-away distributions: no upstream and no network is needed."""
