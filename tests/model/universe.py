"""The small world that the machine draws from: few names, tiny caps, times that cross every expiry."""

WORKERS = ("w1", "w2")
INSTANCES = ("p1", "p2")
ENGINES = ("e1", "e2")
LOADERS = ("e1", "e2", "e3")
LOADING_STATES = ("ready", "loading", "loading", "loading", "starting", "quarantined", "stopped")
PHASES = (b"prepare", b"broadcast", b"abandoned")
TASKS = tuple("abcdefgh")
OWN_TASKS = ("own1", "own2", "own3", "own4", "own5", "own6")
STAGES = ("rewards", "ref", "val")
ENVIRONMENTS = ("math", "code", "Art", "a:b", "é")
"""Their order by bytes is not that of any dictionary; one holds the separator of the store's keys."""
PRIORITIES = (0, 0, 0, 2, 2, 9)
TIME_STEPS_MS = (1, 400, 3_000, 11_000, -500)
MIB = 1 << 20

BODIES = (b"", b"x" * 10, b"\x00\r\n\xff")
"""Ends of payloads."""
TOKENS = (1, 5, 5, 8, 13, 20, 21, 41)
"""Sums of some are equal to others."""
MESSAGES = (12, 24, 40, 60)
"""Sizes of what a lease's reply can carry: a spec has 6 bytes, a partial rollout from 4 to 20, several of both do not
fit.
"""
SIZES = (0, 100, 100, 100, 400_000, MIB, MIB + 1)
"""Bytes of groups: the last is above the smallest cap on its own."""
REWARDS = ((False, 500), (False, -250), (False, 1_000), (True, 0), (True, 1_000))
"""Rewards: whether all are equal, and their mean in milli-rewards."""
REWARD_SUMS = (0, 1_500, -750, 10**12, -(10**12))
"""Over samples, in milli-rewards."""
COUNTERS = ((0, 0, 0), (0, 0, 0), (10, 20, 30), (11, 20, 40), (500, 700, 1_400), (3, 900, 1_000), (1 << 40,) * 3)
"""Counters of engines: tokens, busy and request ms; some are smaller than others in one of them only."""
CLOCKS = (None, None, (100, 50), (100, 80), (350, 90), (20, 400))
"""Clocks of trainers: busy and waiting ms."""
LENGTHS = ((5, 5), (3, 12), (1, 4), (12, 40), (0, 30))
"""Shortest and longest response, in tokens."""
MEANS = (0, 1, 500, 999, 999, 1_000)
"""Positions of the mean version between head and tail, in thousandths."""
