package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// checkWritten sees whether files that serve appends to can be opened, without
// making them: serve would end where they cannot.
func (c *Config) checkWritten(f *faults) {
	if log := c.AccessLog.File; log != "" && log != "stdout" && log != "stderr" {
		appendable(f, "access_log.file", log)
	}
	if c.Record.File != "" {
		appendable(f, "record.file", c.Record.File)
	}
}

// appendable adds a fault where lines cannot be appended to the file that path names.
func appendable(f *faults, path, file string) {
	info, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		folder := filepath.Dir(file)
		if info, err := os.Stat(folder); err != nil || !info.IsDir() {
			f.add(path, "%s: there is no folder %s; make it, writable for whoever runs warmroute", file, folder)
		} else if err := mayCreateIn(folder); err != nil {
			f.add(path, "%s: no file can be made in %s (%v); let whoever runs warmroute write there", file, folder, err)
		}
	case err != nil:
		f.add(path, "%v", err)
	case info.IsDir():
		f.add(path, "%s is a folder; name a file", file)
	case info.Mode().IsRegular(): // a pipe's reader would take the look for the end
		opened, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			f.add(path, "%v", err)
			return
		}
		opened.Close()
	}
}
