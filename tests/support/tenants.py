"""Two tenants with keys, for tests that need authentication on."""

KEYS = {"sk-alice": "alice", "sk-bob": "bob"}
ALICE, BOB = {"authorization": "Bearer sk-alice"}, {"authorization": "Bearer sk-bob"}
