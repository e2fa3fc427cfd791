"""All decisions of lumenbox: pure, told by events, answering with commands. See README.md beside this file."""
