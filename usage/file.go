package usage

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"warmroute/atomicfile"
	"warmroute/filelock"
)

const (
	// fileMark begins every file.
	fileMark = `{"warmroute_usage":1,`
	// headerFormat is the first line. The day is that of the last compaction.
	headerFormat = fileMark + "\"compacted\":\"%s\"}\n"
	// rowMark begins every other line, and is followed by the hour.
	rowMark      = `{"hour":"`
	maxLineBytes = 64 << 10

	// During a binary upgrade both processes take turns. A write takes milliseconds, a compaction seconds.
	writeLockTimeout = 5 * time.Second
	// compactInterval is the time between two checks of whether a compaction is due.
	compactInterval = time.Hour
)

// file is the account on disk: one row a line. The rows of an hour are appended in parts, and a compaction sums them up
// once a day. It is not safe for concurrent use; processes exclude each other by locks.
type file struct {
	path string
	keep time.Duration // age of rows that a compaction removes; 0: none
	lock filelock.Lock // held while a proxy runs

	compactAfter time.Time // so that a full disk is not filled by each try
}

// openFile returns the file, created if it does not exist. It fails if the file cannot be written, and, with lockNow,
// if another process has locked it; without lockNow, a predecessor has.
func openFile(path string, keep time.Duration, lockNow bool) (f *file, err error) {
	if err := CheckFile(path); err != nil {
		return nil, err
	}
	f = &file{path: path, keep: keep, lock: filelock.NewLock(path)}
	if lockNow {
		if err := f.lock.TryLock(); err != nil {
			return nil, err
		}
	}
	atomicfile.RemoveStaleTemps(path, nil)
	out, _, err := f.openForWriting()
	if err != nil {
		f.lock.Unlock()
		return nil, err
	}
	return f, out.Close()
}

// openForWriting opens the file, locked until it is closed, and removes an incomplete last line. It returns the file
// and its size.
func (f *file) openForWriting() (out *os.File, size int64, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), writeLockTimeout)
	defer cancel()
	if out, err = filelock.Open(ctx, f.path); err != nil {
		return nil, 0, err
	}
	if size, err = truncateToLines(out); err != nil {
		out.Close()
		return nil, 0, err
	}
	return out, size, nil
}

// CheckFile returns an error if there is a file at path that is not a usage file.
func CheckFile(path string) error {
	return atomicfile.CheckMark(path, fileMark, "a usage file of warmroute")
}

// truncateToLines removes an incomplete last line, and returns the size of the file.
func truncateToLines(file *os.File) (size int64, err error) {
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	end, newline := info.Size(), -1
	for newline < 0 && end > 0 { // a crash of the machine may leave more than the longest line
		part := make([]byte, min(end, maxLineBytes))
		start := end - int64(len(part))
		if _, err := file.ReadAt(part, start); err != nil {
			return 0, err
		}
		newline = bytes.LastIndexByte(part, '\n')
		end = start + int64(newline) + 1
	}
	if end == info.Size() {
		return end, nil
	}
	return end, file.Truncate(end)
}

// append appends the rows, all or none.
func (f *file) append(rows []Row, now time.Time) error {
	out, size, err := f.openForWriting()
	if err != nil {
		return err
	}
	defer out.Close()
	var lines bytes.Buffer
	if size == 0 {
		fmt.Fprintf(&lines, headerFormat, now.UTC().Format(time.DateOnly))
	}
	encoder := json.NewEncoder(&lines)
	for i := range rows {
		if err := encoder.Encode(&rows[i]); err != nil {
			return err
		}
	}
	if _, err = out.WriteAt(lines.Bytes(), size); err == nil {
		err = out.Sync() // a disk may report only now that it is full
	}
	if err != nil {
		return errors.Join(err, out.Truncate(size))
	}
	return nil
}

// compactDaily sums up the rows of each hour, and removes old ones, unless that was done today.
func (f *file) compactDaily(now time.Time) error {
	if now.Before(f.compactAfter) {
		return nil
	}
	f.compactAfter = now.Add(compactInterval)
	out, size, err := f.openForWriting()
	if err != nil || size == 0 {
		return err
	}
	defer out.Close()
	header := fmt.Sprintf(headerFormat, now.UTC().Format(time.DateOnly))
	first := make([]byte, len(header))
	if _, err := out.ReadAt(first, 0); err == nil && string(first) == header {
		return nil
	}
	var from time.Time
	if f.keep > 0 {
		from = now.Add(-f.keep)
	}
	return atomicfile.Write(f.path, func(w io.Writer) error {
		if _, err := io.WriteString(w, header); err != nil {
			return err
		}
		encoder, hour, sums := json.NewEncoder(w), int64(0), rowSet{}
		writeSums := func() error {
			for _, row := range sums.rows() {
				if err := encoder.Encode(&row); err != nil {
					return err
				}
			}
			clear(sums)
			return nil
		}
		var writeErr error
		_, err := Read(out, from, time.Time{}, func(r *Row) {
			if id := r.id(); id.hour != hour && writeErr == nil {
				writeErr, hour = writeSums(), id.hour
			}
			sums.add(r.id(), &r.Counts)
		})
		return errors.Join(err, writeErr, writeSums())
	})
}

// Read calls add with each row of a usage file whose hour is not before that of from and before to, where they are not
// zero, oldest first. It ignores lines that are not rows, as a crash may leave them, and returns how many there were,
// without an incomplete last one.
func Read(r io.Reader, from, to time.Time, add func(*Row)) (ignored int, err error) {
	lines := bufio.NewReaderSize(r, maxLineBytes)
	from = from.Truncate(time.Hour)
	for number := 0; ; number++ {
		line, err := lines.ReadSlice('\n')
		isLong := errors.Is(err, bufio.ErrBufferFull)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = lines.ReadSlice('\n')
		}
		switch {
		case number == 0 && len(line) > 0 && !bytes.HasPrefix(line, []byte(fileMark)):
			return 0, errors.New("not a usage file of warmroute")
		case errors.Is(err, io.EOF):
			return ignored, nil
		case err != nil:
			return ignored, err
		case number == 0:
			continue
		}
		hour, ok := parseHour(line)
		if !ok || isLong {
			ignored++
			continue
		}
		if hour.Before(from) || !to.IsZero() && !hour.Before(to) {
			continue
		}
		var row Row
		if json.Unmarshal(line, &row) != nil || !row.isValid() {
			ignored++
			continue
		}
		row.Hour = hour
		add(&row)
	}
}

// parseHour returns the hour of a row, which is not decoded for that: most rows of a file are not asked for.
func parseHour(line []byte) (hour time.Time, ok bool) {
	rest, ok := bytes.CutPrefix(line, []byte(rowMark))
	if !ok || len(rest) < len(time.RFC3339) {
		return hour, false
	}
	text, _, ok := bytes.Cut(rest, []byte(`"`))
	if !ok {
		return hour, false
	}
	hour, err := time.Parse(time.RFC3339, string(text))
	return hour.UTC().Truncate(time.Hour), err == nil
}

// open opens the file for reading, and returns its size; nil if it does not exist. What is opened keeps its rows while
// others are appended, and when a compaction replaces the file.
func (f *file) open() (in *os.File, size int64, err error) {
	in, err = os.Open(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	info, err := in.Stat()
	if err != nil {
		in.Close()
		return nil, 0, err
	}
	return in, info.Size(), nil
}
