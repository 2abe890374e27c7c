"""The arithmetic of a step behind one set of signatures: `reference` (plain torch) and one module per device kind."""
