package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// checkWritten sees whether files that serve writes can be opened, without
// making them: serve would end where they cannot.
func (c *Config) checkWritten(f *faults) {
	if log := c.AccessLog.File; log != "" && log != "stdout" && log != "stderr" {
		appendable(f, "access_log.file", log)
	}
	if c.Record.File != "" {
		appendable(f, "record.file", c.Record.File)
	}
	if c.Index.Snapshot != "" {
		checkReplaceable(f, "index.snapshot", c.Index.Snapshot)
	}
}

// checkReplaceable adds a fault where the snapshot that path names cannot be replaced
// by a new file.
func checkReplaceable(f *faults, path, file string) {
	if info, err := os.Stat(file); err == nil && info.IsDir() {
		f.add(path, "%s is a folder; name a file", file)
	} else if err := replaceable(file); err != nil {
		f.add(path, "%v", err)
	}
	checkFolder(f, path, file)
}

// checkFolder adds a fault where file cannot be made in its folder.
func checkFolder(f *faults, path, file string) {
	folder := filepath.Dir(file)
	if info, err := os.Stat(folder); err != nil || !info.IsDir() {
		f.add(path, "%s: folder %s does not exist: create it, writable by the user that runs warmroute", file, folder)
	} else if err := mayCreateIn(folder); err != nil {
		f.add(path, "%s: cannot create a file in %s (%v): make it writable by the user that runs warmroute", file, folder, err)
	}
}

// appendable adds a fault where lines cannot be appended to the file that path names.
func appendable(f *faults, path, file string) {
	info, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		checkFolder(f, path, file)
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
