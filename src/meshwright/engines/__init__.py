"""Other training engines: which recipes each can express, and their translation into its program."""
