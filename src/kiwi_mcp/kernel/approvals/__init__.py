"""Approvals: the gate where plans wait for the owner, the question that is put, and the verb that answers it."""
