"""Who keeps the others waiting: every rank's board, the watch in each rank, the keeper in the launcher."""
