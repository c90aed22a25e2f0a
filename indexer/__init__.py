"""From a corpus to an index: reading, staging, planning, fitting, encoding."""
