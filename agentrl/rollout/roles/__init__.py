"""Roles: several agents in one episode, roles that others call like tools, and simulated users.

agent.roles, AgentLoop.roles, EnvironmentSpec.roles_of ─► RunRoles ─► RoleEpisode (a RuntimeEpisode)

Only episodes whose loop, config or environment names roles are played by this package.
"""
