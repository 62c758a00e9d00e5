"""What a run found, for machines (report.json) and for people (a table)."""
