"""The chassis of one worker process: engine and kvtransfer behind one port, for whichever phases are injected."""
