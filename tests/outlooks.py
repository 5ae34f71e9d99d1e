"""Outlooks of a small engine, as tests of forecasts look at them."""

from dataclasses import replace

from penstock.sched.outlook import Outlook, QueuedRequest, RunningRequest
from penstock.sched.pace import StepSeconds

SIZE, BUDGET = 16, 256
STEPS = StepSeconds(((1.0, 8.0), (0.01, 0.017)), ((16.0, 256.0), (0.02, 0.1)), 0.0)
IDLE = Outlook(0.0, (), (), (), 1000, 4, BUDGET, SIZE, 1e9, False, True, STEPS)
NEW = QueuedRequest(16, 10, 0, 16)
BUSY = replace(IDLE, running=tuple(RunningRequest(0, left, 30) for left in (50, 60, 70, 80)))
