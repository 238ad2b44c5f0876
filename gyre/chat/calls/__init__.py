"""Tool calls as each family of templates writes them: reading what a policy wrote, by the schema of the tool."""
