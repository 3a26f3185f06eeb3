package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// module is one that is linked into the binary; Go's own packages are one as well.
type module struct {
	path, version, sum string
	ids                []string // of its licences, as SPDX has them
	licences           []file   // named within the module
}

// modules lists what is linked, by path, with the licences that stand in the
// folders of the linked packages and above them. One without is an error: it may
// not be passed on.
func (c *clone) modules(info *buildinfo.BuildInfo) ([]*module, error) {
	root, err := c.output("go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	std := &module{path: "std", version: strings.TrimPrefix(info.GoVersion, "go")}
	if err := std.collect(root, root); err != nil {
		return nil, err
	}
	linked := []*module{std}
	known := map[string]*module{}
	for _, d := range info.Deps {
		m := &module{path: d.Path, version: d.Version, sum: d.Sum}
		linked, known[d.Path] = append(linked, m), m
	}
	listed, err := c.output("go", "list", "-deps", "-json=Dir,Module", ".")
	if err != nil {
		return nil, err
	}
	for packages := json.NewDecoder(strings.NewReader(listed)); ; {
		var p struct {
			Dir    string
			Module *struct{ Path, Dir string }
		}
		if err := packages.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		if p.Module == nil || known[p.Module.Path] == nil {
			continue
		}
		if err := known[p.Module.Path].collect(p.Module.Dir, p.Dir); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(linked, func(a, b *module) int { return strings.Compare(a.path, b.path) })
	for _, m := range linked {
		if len(m.licences) == 0 {
			return nil, fmt.Errorf("%s %s has no licence that could be found: it may not be passed on", m.path, m.version)
		}
		if len(m.ids) == 0 {
			return nil, fmt.Errorf("the licence of %s %s (%s) is none that is known here; read it", m.path, m.version, m.licences[0].name)
		}
	}
	return linked, nil
}

// collect takes the licences of the folders from dir up to the module's root: files
// of that name, or what a folder of that name holds.
func (m *module) collect(root, dir string) error {
	for ; ; dir = filepath.Dir(dir) {
		for _, pattern := range []string{"*", "licenses/*"} {
			found, err := filepath.Glob(filepath.Join(dir, pattern))
			if err != nil {
				return err
			}
			for _, path := range found {
				if err := m.take(root, path); err != nil {
					return err
				}
			}
		}
		if dir == root || len(dir) < len(root) {
			return nil
		}
	}
}

// take reads the file if its name says that it is a licence.
func (m *module) take(root, path string) error {
	wanted := regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([.-].*)?$|/licenses/[^/]*\.txt$`)
	name, err := filepath.Rel(root, path)
	if err != nil {
		return err
	}
	name = filepath.ToSlash(name)
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case !info.Mode().IsRegular() || strings.HasSuffix(name, ".go"):
		return nil
	case !wanted.MatchString(filepath.Base(path)) && !wanted.MatchString("/"+name):
		return nil
	case slices.ContainsFunc(m.licences, func(f file) bool { return f.name == name }):
		return nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	m.licences = append(m.licences, file{name: name, data: text})
	m.ids = append(m.ids, licenceIDs(text)...)
	slices.Sort(m.ids)
	m.ids = slices.Compact(m.ids)
	return nil
}

// licenceIDs tells the usual licences by words that only they have.
func licenceIDs(text []byte) (ids []string) {
	words := string(bytes.Join(bytes.Fields(text), []byte(" ")))
	known := []struct{ id, says, unless string }{
		{"Apache-2.0", "Apache License Version 2.0", ""},
		{"Apache-2.0", "under the Apache License, Version 2.0", ""},
		{"MPL-2.0", "Mozilla Public License, version 2.0", ""},
		{"BSD-3-Clause", "may be used to endorse or promote products derived from", ""},
		{"BSD-2-Clause", "Redistributions in binary form must reproduce", "to endorse or promote"},
		{"ISC", "Permission to use, copy, modify, and/or distribute this software", ""},
		{"OFL-1.1", "SIL OPEN FONT LICENSE Version 1.1", ""},
		{"MIT", "Permission is hereby granted, free of charge", "SIL OPEN FONT LICENSE"},
		{"CC-BY-4.0", "Creative Commons Attribution 4.0 International Public License", ""},
		{"FTL", "The FreeType Project LICENSE", ""}, // the one that is chosen where the other is the GPL
	}
	for _, l := range known {
		if strings.Contains(words, l.says) && (l.unless == "" || !strings.Contains(words, l.unless)) && !slices.Contains(ids, l.id) {
			ids = append(ids, l.id)
		}
	}
	return ids
}

// licenceTexts are the licences of all modules, one after another.
func licenceTexts(linked []*module) []byte {
	var all bytes.Buffer
	all.WriteString("The binary holds the following software, each under its own licence.\n")
	for _, m := range linked {
		for _, l := range sorted(m.licences) {
			fmt.Fprintf(&all, "\n%s\n%s %s: %s\n\n%s\n", strings.Repeat("=", 80), m.path, m.version, l.name, bytes.TrimSpace(l.data))
		}
	}
	return all.Bytes()
}
