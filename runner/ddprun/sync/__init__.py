"""When ranks synchronise: one policy per file, and what goes with them: buffers, mutation, the audit."""
