# SPDX-License-Identifier: Apache-2.0
"""What the tests and benchmarks of every package share. Never published, never imported by a package.

* `support.bench`: the benchmark harness behind ``nox -s bench``.
* `support.machine`: the machine and the versions a figure was measured on.
* `support.processes`: start a server, wait until it answers, end all of it.
* `support.sessions`: agent sessions and cold arrivals, drawn from a seed.

Importable where ``tests`` is on the path: pytest and nox put it there.
"""
