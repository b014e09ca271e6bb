"""What a run left behind, read and shown: a page, a trace."""
