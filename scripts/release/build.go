package main

import (
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

// archs are the architectures of a release.
var archs = []string{"amd64", "arm64"}

// shippedPaths are in every archive beside the binary, so that the links and commands
// of the documents work.
var shippedPaths = []string{
	"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "config.yaml", "docker-compose.yml", ".env",
	"docs", "lab/docs", "scripts/compose", "scripts/monitoring", "scripts/systemd",
}

// archiveDockerfile is the archive's Dockerfile. That of the repository builds from source.
const archiveDockerfile = "scripts/release/Dockerfile"

// checkout is a clone of the repository at one commit.
type checkout struct {
	dir       string
	committed time.Time // the only time in a release
	env       []string
}

// cloneAndBuild returns the files of a release of ref, built in dir, which it creates.
func cloneAndBuild(dir, ref string, env ...string) ([]file, error) {
	c, err := cloneCheckout(dir, ref)
	if err != nil {
		return nil, err
	}
	c.env = append(c.env, env...)
	var files []file
	for _, arch := range archs {
		built, err := c.buildPlatform(arch)
		if err != nil {
			return nil, fmt.Errorf("linux/%s: %w", arch, err)
		}
		files = append(files, built...)
	}
	files = sortFiles(files)
	return append(files, checksums(files)), nil
}

// cloneCheckout clones the repository in the working directory, with its tags, from
// which Go derives the version.
func cloneCheckout(dir, ref string) (*checkout, error) {
	here := &checkout{dir: "."}
	commit, err := here.output("git", "rev-parse", "--verify", ref+"^{commit}")
	if err != nil {
		return nil, err
	}
	if _, err := here.output("git", "clone", "--quiet", "--no-checkout", ".", dir); err != nil {
		return nil, err
	}
	// The environment variables that change what Go builds are fixed.
	c := &checkout{dir: dir, env: []string{"CGO_ENABLED=0", "GOOS=linux", "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=", "GOEXPERIMENT=",
		"GOFIPS140=off", "GOWORK=off", "GODEBUG="}}
	if _, err := c.output("git", "checkout", "--quiet", "--detach", commit); err != nil {
		return nil, err
	}
	text, err := c.output("git", "show", "--no-patch", "--format=%ct")
	if err != nil {
		return nil, err
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	c.committed = time.Unix(seconds, 0).UTC()
	return c, err
}

// output runs a command in the checkout and returns its standard output.
func (c *checkout) output(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = c.dir, append(os.Environ(), c.env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// buildPlatform returns the archive and the SBOM for linux on arch.
func (c *checkout) buildPlatform(arch string) ([]file, error) {
	platform := *c
	platform.env = append(slices.Clone(c.env), "GOARCH="+arch)
	// The flags of the Dockerfile, so that an image has the same binary.
	if _, err := platform.output("go", "build", "-trimpath", "-buildvcs=true", "-o", "warmroute", "."); err != nil {
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
		return nil, fmt.Errorf("version %s of a clean clone is dirty: does the build write a tracked file?", version)
	}
	modules, err := platform.modules(info)
	if err != nil {
		return nil, err
	}
	files, err := c.shippedFiles()
	if err != nil {
		return nil, err
	}
	licences := file{"THIRD_PARTY_LICENSES", 0o644, licenceTexts(modules)}
	files = append(files, file{"warmroute", 0o755, binary}, licences)
	name := "warmroute-" + version + "-linux-" + arch
	packed, err := packTarGz(inFolder(name, files), c.committed)
	if err != nil {
		return nil, err
	}
	bill, err := sbom(info, binary, modules, c.committed)
	if err != nil {
		return nil, err
	}
	own := files[slices.IndexFunc(files, func(f file) bool { return f.name == "LICENSE" })]
	readme := files[slices.IndexFunc(files, func(f file) bool { return f.name == "README.md" })]
	python, err := wheel(version, arch, binary, []file{own, licences}, readme.data, c.committed)
	if err != nil {
		return nil, err
	}
	docker, err := image(version, arch, binary, c.committed)
	return []file{{name: name + ".tar.gz", data: packed}, {name: name + ".cdx.json", data: bill}, python, docker}, err
}

// inFolder returns files with their names below a folder.
func inFolder(folder string, files []file) (moved []file) {
	for _, f := range files {
		moved = append(moved, file{folder + "/" + f.name, f.mode, f.data})
	}
	return moved
}

// shippedFiles returns the files of shippedPaths and the Dockerfile.
func (c *checkout) shippedFiles() (files []file, err error) {
	root := os.DirFS(c.dir)
	for _, path := range shippedPaths {
		err := fs.WalkDir(root, path, func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			data, err := fs.ReadFile(root, name)
			files = append(files, file{name, 0o644, data})
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	dockerfile, err := fs.ReadFile(root, archiveDockerfile)
	return append(files, file{"Dockerfile", 0o644, dockerfile}), err
}
