"""What `infer` makes of a folder: throughput against the bare session, where the time goes, and what bounds it."""
