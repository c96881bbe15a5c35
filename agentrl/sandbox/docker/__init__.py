"""The back end ``docker``: containers through the Docker API, of Docker or Podman.

The container's first process is the supervisor that local sandboxes have, too. It is run by the image's Python and
spoken to through the container's standard input and output. When that hangs up, or its time is over, it ends, and
everything in the container with it.
"""

from agentrl.sandbox.docker.sandbox import DockerSandbox as DockerSandbox
