"""Is a drafter worth serving? Acceptance statistics, break-even, the probe and its verdict."""
