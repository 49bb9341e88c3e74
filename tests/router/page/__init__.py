"""The live page in a browser, over fake engines."""
