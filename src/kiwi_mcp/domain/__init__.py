"""The words: frozen types, pure functions and errors. Imports nothing else of Kiwi."""
