"""Where processes are and how they end: ranks found or started, watched, signalled, restarted."""
