package config

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"warmroute/router/snapshot"
	"warmroute/usage"
)

// validateFiles checks that the files that serve writes are different ones and
// can be opened, without creating them.
func (c *Config) validateFiles(errs *errorList) {
	files := []struct {
		path, file string
		check      func(errs *errorList, path, file string)
	}{{"access_log.file", c.AccessLog.File, checkWritable}, {"recording.file", c.Recording.File, checkWritable},
		{"index.snapshot", c.Index.Snapshot, checkReplaceable}, {"state_file", c.StateFile, checkStateFile},
		{"usage.file", c.Usage.File, checkUsageFile}}
	for i, f := range files {
		if f.file == "" || i == 0 && (f.file == "stdout" || f.file == "stderr") {
			continue
		}
		f.check(errs, f.path, f.file)
		for _, other := range files[i+1:] {
			if other.file != "" && filepath.Clean(f.file) == filepath.Clean(other.file) {
				errs.add(f.path, "%s is also %s; use another file for one of the two", f.file, other.path)
			}
		}
	}
}

// checkStateFile adds an error if a file cannot be written as a state file, or is another file that would be lost.
func checkStateFile(errs *errorList, path, file string) {
	info, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		errs.add(path, "%v", err)
	case !info.Mode().IsRegular():
		errs.add(path, "%s is not a regular file", file)
	case info.Size() > 0 && !startsWithBrace(file):
		errs.add(path, "%s is not a state file of warmroute; name another file", file)
	}
	checkCreatable(errs, path, file)
}

// checkUsageFile adds an error if a file cannot be written as a usage file, or is another file.
func checkUsageFile(errs *errorList, path, file string) {
	if err := usage.CheckFile(file); err != nil {
		errs.add(path, "%v", err)
		return
	}
	checkWritable(errs, path, file)
	if _, err := os.Stat(file); err == nil { // a compaction replaces it
		checkCreatable(errs, path, file)
	}
}

// startsWithBrace reports whether a file may be a JSON object. One that cannot be read is reported when it is used.
func startsWithBrace(file string) bool {
	opened, err := os.Open(file)
	if err != nil {
		return true
	}
	defer opened.Close()
	first := make([]byte, 1)
	_, err = io.ReadFull(opened, first)
	return err != nil || first[0] == '{'
}

// checkReplaceable adds an error if a file cannot be replaced by a new file.
func checkReplaceable(errs *errorList, path, file string) {
	if info, err := os.Stat(file); err == nil && info.IsDir() {
		errs.add(path, "%s is a directory, expected a file", file)
	} else if err := snapshot.CheckReplaceable(file); err != nil {
		errs.add(path, "%v", err)
	}
	checkCreatable(errs, path, file)
}

// checkCreatable adds an error if file cannot be created in its directory.
func checkCreatable(errs *errorList, path, file string) {
	dir := filepath.Dir(file)
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		errs.add(path, "%s: directory %s does not exist; create it, writable by the user that runs warmroute", file, dir)
	} else if err := checkDirWritable(dir); err != nil {
		errs.add(path, "%s: cannot create a file in %s (%v); make it writable by the user that runs warmroute", file, dir, err)
	}
}

// checkWritable adds an error if lines cannot be appended to file.
func checkWritable(errs *errorList, path, file string) {
	info, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		checkCreatable(errs, path, file)
	case err != nil:
		errs.add(path, "%v", err)
	case info.IsDir():
		errs.add(path, "%s is a directory, expected a file", file)
	case info.Mode().IsRegular(): // opening and closing a pipe would end its reader
		opened, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			errs.add(path, "%v", err)
			return
		}
		opened.Close()
	}
}
