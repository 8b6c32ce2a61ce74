"""The machine of a process.

process.py     logs, signals, files replaced as a whole
exit_codes.py  the last words of a process: printable texts, exit codes
log_lines.py   the form of log lines, and a bound on those that peers cause
cuda.py        CUDA or the CPU, and never the CPU in silence
start_line.py  what a process computes on, in a line of its log
hub.py         folders of models and datasets
placement.py   GPUs, and which process runs on which
memory_use.py  the memory of this process
template.py    text files rendered from templates of a package
service.py     messages to systemd: ready, alive, stopping
serving.py     servers as child processes: how they are started, and how they begin
"""
