"""How long a test waits for something that hangs: a child process, a thread, a buffer that is not released.

These limits only end a run that would never end. They are far above what any machine needs, so a slow or busy machine
never fails a test. tests/test_time_limits.py refuses a shorter limit anywhere in tests/.
"""

HANG_S = 600
