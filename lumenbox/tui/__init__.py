"""The terminal's view of a box. Views are values (`Snapshot -> Text`); see README.md. Knows no torch and no HTTP."""
