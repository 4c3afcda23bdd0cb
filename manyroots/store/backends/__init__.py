"""Where units last: one file per kind of storage."""
