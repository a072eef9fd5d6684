"""`pointsman up`: a whole fleet on one machine, each part its own process, watched until Ctrl-C.

`settings` is what people may ask for, `plan` turns it into processes (pure), `child` is the life of one process,
`runner` starts, watches and stops them all, `display` shows it, `command` puts it together.
"""
