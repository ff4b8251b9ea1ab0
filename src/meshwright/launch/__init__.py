"""Processes of a run: ranks are found or started, watched, signalled and restarted."""
