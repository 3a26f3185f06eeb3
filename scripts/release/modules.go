package main

import (
	"bytes"
	"cmp"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// module is a module that is linked into the binary, or Go's standard library.
type module struct {
	path, version, sum string
	ids                []string // SPDX identifiers of the licences
	licences           []file   // named within the module
}

// modules returns the linked modules by path, with the licences in the folders of the
// linked packages and above them. It fails if a module has no known licence, since it
// may then not be distributed.
func (c *checkout) modules(info *buildinfo.BuildInfo) ([]*module, error) {
	root, err := c.output("go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	std := &module{path: "std", version: strings.TrimPrefix(info.GoVersion, "go")}
	if err := std.addLicences(root, root); err != nil {
		return nil, err
	}
	modules, byPath := []*module{std}, map[string]*module{}
	for _, d := range info.Deps {
		m := &module{path: d.Path, version: d.Version, sum: d.Sum}
		modules, byPath[d.Path] = append(modules, m), m
	}
	list, err := c.output("go", "list", "-deps", "-json=Dir,Module", ".")
	if err != nil {
		return nil, err
	}
	for packages := json.NewDecoder(strings.NewReader(list)); ; {
		var p struct {
			Dir    string
			Module struct{ Path, Dir string }
		}
		if err := packages.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		if m := byPath[p.Module.Path]; m != nil {
			if err := m.addLicences(p.Module.Dir, p.Dir); err != nil {
				return nil, err
			}
		}
	}
	slices.SortFunc(modules, func(a, b *module) int { return cmp.Compare(a.path, b.path) })
	for _, m := range modules {
		if len(m.ids) == 0 {
			return nil, fmt.Errorf("%s %s has no known licence (files: %d): it may not be distributed", m.path, m.version, len(m.licences))
		}
	}
	return modules, nil
}

var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([.-].*)?$|^licenses/[^/]*\.txt$`)

// addLicences adds the licence files in the folders from dir up to the module's root:
// those with a usual name, and the texts in a folder "licenses".
func (m *module) addLicences(root, dir string) error {
	for ; ; dir = filepath.Dir(dir) {
		files, _ := filepath.Glob(filepath.Join(dir, "*")) // the pattern is valid
		texts, _ := filepath.Glob(filepath.Join(dir, "licenses", "*"))
		for _, path := range append(files, texts...) {
			within, err := filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			if !licenceName.MatchString(filepath.Base(path)) && !licenceName.MatchString(within) || filepath.Ext(path) == ".go" {
				continue
			}
			if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
				continue
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			if slices.ContainsFunc(m.licences, func(f file) bool { return f.name == name }) {
				continue
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			m.licences = append(m.licences, file{name: name, data: text})
			m.ids = append(m.ids, licenceIDs(text)...)
		}
		if dir == root || len(dir) < len(root) {
			slices.Sort(m.ids)
			m.ids = slices.Compact(m.ids)
			return nil
		}
	}
}

// licencePhrases identify a licence by a phrase that only it contains.
var licencePhrases = []struct{ id, phrase, unless string }{
	{"Apache-2.0", "Apache License Version 2.0", ""},
	{"Apache-2.0", "under the Apache License, Version 2.0", ""},
	{"MPL-2.0", "Mozilla Public License, version 2.0", ""},
	{"BSD-3-Clause", "may be used to endorse or promote products derived from", ""},
	{"BSD-2-Clause", "Redistributions in binary form must reproduce", "to endorse or promote"},
	{"ISC", "Permission to use, copy, modify, and/or distribute this software", ""},
	{"OFL-1.1", "SIL OPEN FONT LICENSE Version 1.1", ""},
	{"MIT", "Permission is hereby granted, free of charge", "SIL OPEN FONT LICENSE"},
	{"CC-BY-4.0", "Creative Commons Attribution 4.0 International Public License", ""},
	{"FTL", "The FreeType Project LICENSE", ""}, // chosen where the alternative is the GPL
}

// licenceIDs returns the SPDX identifiers of the known licences in text.
func licenceIDs(text []byte) (ids []string) {
	words := string(bytes.Join(bytes.Fields(text), []byte(" ")))
	for _, l := range licencePhrases {
		if strings.Contains(words, l.phrase) && (l.unless == "" || !strings.Contains(words, l.unless)) && !slices.Contains(ids, l.id) {
			ids = append(ids, l.id)
		}
	}
	return ids
}

// licenceTexts returns the licences of all modules, one after another.
func licenceTexts(modules []*module) []byte {
	var all bytes.Buffer
	all.WriteString("The binary contains the following software, each under its own licence.\n")
	for _, m := range modules {
		for _, l := range sortFiles(m.licences) {
			fmt.Fprintf(&all, "\n%s\n%s %s: %s\n\n%s\n", strings.Repeat("=", 80), m.path, m.version, l.name, bytes.TrimSpace(l.data))
		}
	}
	return all.Bytes()
}
