# SPDX-License-Identifier: Apache-2.0
"""The simulator behind ``kv-router-sim``: the same policy code, a fleet that exists only in time.

* `traces`: Mooncake's and Weka's trace files, and the arrivals they make.
* `fleet`: pools of workers, arrivals and faults; `simulate` runs them against a policy.
* `engine`: one worker: scheduler, cache, tiers, ranks in lockstep.
* `timing`: how long a step lasts.
* `policies`: round robin, least loaded, and Dynamo's formula.
* `scenario`: all of these by name, from files and words.
* `report`: figures, tables and plots.

A simulation is a function of its input: it knows no clock and draws nothing without a seed.
"""
