"""Other training engines beside ours: what each can express of a recipe, and the program that it is then."""
