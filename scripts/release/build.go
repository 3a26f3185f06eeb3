package main

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// clone is a commit, checked out in a folder of its own.
type clone struct {
	dir  string
	made time.Time // of the commit: the only time that a release knows
	env  []string
}

// build makes the files of a release in dir, which it creates. cache is for Go's
// build cache, "" for the usual one.
func build(dir, ref string, archs []string, cache string) ([]file, error) {
	c, err := newClone(dir, ref, cache)
	if err != nil {
		return nil, err
	}
	var files []file
	for _, arch := range archs {
		made, err := c.platform(arch)
		if err != nil {
			return nil, fmt.Errorf("linux/%s: %w", arch, err)
		}
		files = append(files, made...)
	}
	files = sorted(files)
	return append(files, sums(files)), nil
}

// newClone clones the repository of the current folder. Tags come along: the
// toolchain makes the version of them.
func newClone(dir, ref, cache string) (*clone, error) {
	here := &clone{dir: "."}
	commit, err := here.output("git", "rev-parse", "--verify", ref+"^{commit}")
	if err != nil {
		return nil, err
	}
	if changes, err := here.output("git", "status", "--porcelain"); err != nil {
		return nil, err
	} else if changes != "" {
		fmt.Fprintln(os.Stderr, "release: what is not committed is not in it")
	}
	top, err := here.output("git", "rev-parse", "--show-toplevel")
	if err != nil {
		return nil, err
	}
	if _, err := here.output("git", "clone", "--quiet", "--no-checkout", top, dir); err != nil {
		return nil, err
	}
	c := &clone{dir: dir}
	if _, err := c.output("git", "checkout", "--quiet", "--detach", commit); err != nil {
		return nil, err
	}
	seconds, err := c.output("git", "show", "--no-patch", "--format=%ct")
	if err != nil {
		return nil, err
	}
	made, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return nil, err
	}
	c.made = time.Unix(made, 0).UTC()
	// What a machine's own environment could change of the bytes.
	c.env = []string{"CGO_ENABLED=0", "GOOS=linux", "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=", "GOEXPERIMENT=", "GOFIPS140=off", "GOWORK=off", "GODEBUG="}
	if cache != "" {
		c.env = append(c.env, "GOCACHE="+cache)
	}
	return c, nil
}

// output runs a command in the clone and returns what it printed.
func (c *clone) output(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = c.dir, append(os.Environ(), c.env...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, said.String())
	}
	return strings.TrimSpace(string(out)), nil
}

// platform makes the archive and the bill of materials for linux on arch.
func (c *clone) platform(arch string) ([]file, error) {
	on := *c
	on.env = append(slices.Clone(c.env), "GOARCH="+arch)
	// As in the Dockerfile, so that an image has the same binary.
	if _, err := on.output("go", "build", "-trimpath", "-buildvcs=true", "-o", "warmroute", "."); err != nil {
		return nil, err
	}
	path := filepath.Join(c.dir, "warmroute")
	defer os.Remove(path)
	binary, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, err
	}
	version := info.Main.Version
	if strings.HasSuffix(version, "+dirty") {
		return nil, fmt.Errorf("the version is %s, and nothing was changed: is a file written by the build tracked by git?", version)
	}
	linked, err := on.modules(info)
	if err != nil {
		return nil, err
	}
	name := "warmroute-" + version + "-linux-" + arch
	files := []file{{"warmroute", 0o755, binary}, {"THIRD_PARTY_LICENSES", 0o644, licenceTexts(linked)}}
	others, err := c.shipped()
	if err != nil {
		return nil, err
	}
	packed, err := archive(name, append(files, others...), c.made)
	if err != nil {
		return nil, err
	}
	bill, err := sbom(info, binary, linked, c.made)
	if err != nil {
		return nil, err
	}
	return []file{{name: name + ".tar.gz", data: packed}, {name: name + ".cdx.json", data: bill}}, nil
}

// shipped are the files of the repository that go along with the binary, where they
// are there, so that the documents' links and commands hold.
func (c *clone) shipped() ([]file, error) {
	var files []file
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "config.yaml", "docker-compose.yml", ".env", "docs", "scripts/monitoring", "scripts/systemd"} {
		err := filepath.WalkDir(filepath.Join(c.dir, name), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			within, err := filepath.Rel(c.dir, path)
			files = append(files, file{filepath.ToSlash(within), 0o644, data})
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return files, nil
}
