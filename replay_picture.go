package main

import (
	"fmt"
	"os"

	"warmroute/replay"
	"warmroute/replay/chart"
)

// picture is the file that --plot names. It is opened before the work, as a
// path that cannot be written is better known then, and left as it was when
// nothing came of it.
type picture struct{ file *os.File }

func openPicture(path string) (*picture, error) {
	if path == "" {
		return &picture{}, nil
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("--plot: %w", err)
	}
	return &picture{file}, nil
}

func (p *picture) draw(reports []replay.Report) error {
	if p.file == nil {
		return nil
	}
	if err := p.file.Truncate(0); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	if err := chart.Write(p.file, reports); err != nil {
		return fmt.Errorf("draw %s: %w", p.file.Name(), err)
	}
	return nil
}

// close removes the file if nothing was drawn in it, nor before.
func (p *picture) close() error {
	if p.file == nil {
		return nil
	}
	if info, err := p.file.Stat(); err == nil && info.Mode().IsRegular() && info.Size() == 0 {
		os.Remove(p.file.Name())
	}
	if err := p.file.Close(); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	return nil
}
