"""The shipped tools, which are ordinary plug-ins."""

if __name__ != "agentrl.tools":
    raise ImportError(f"{__name__} is the folder of agentrl.tools in a checkout: import agentrl.tools instead")

PLUGINS: dict[str, dict[str, str]] = {
    "tool": {
        "bash": "agentrl.tools.shell:bash",
        "calculator": "agentrl.tools.calculator:calculator",
        "edit_file": "agentrl.tools.files:edit_file",
        "fetch_page": "agentrl.tools.fetch_page:fetch_page",
        "list_dir": "agentrl.tools.files:list_dir",
        "mcp": "agentrl.tools.mcp_tools:MCPTools",
        "python": "agentrl.tools.python:python",
        "read_file": "agentrl.tools.files:read_file",
        "search": "agentrl.tools.search:search",
        "sql": "agentrl.tools.sql:sql",
        "submit": "agentrl.tools.submit:submit",
        "write_file": "agentrl.tools.files:write_file",
    }
}
