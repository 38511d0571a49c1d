"""The metal: processes, requests and secret values. No other package touches them."""
